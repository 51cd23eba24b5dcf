// A Kafka broker for tests that has the calls, limits and answers of another one. Its wire path is real.
//
// The first argument is the kind of broker as JSON. It prints a line once it listens, and ends when its standard
// input ends: so it never outlives the test that started it.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// Kind says what is different from Apache Kafka. tests/kfake/kinds.py has the same fields, with their meaning.
type Kind struct {
	Ports          []int               `json:"ports"`
	Data           string              `json:"data"`
	Release        string              `json:"release"`
	Versions       map[string][2]int16 `json:"versions"`
	Refused        []string            `json:"refused"`
	Features       bool                `json:"features"`
	Hidden         []string            `json:"hidden"`
	Unknown        []string            `json:"unknown"`
	Highest        map[string]int64    `json:"highest"`
	Invalid        map[string]int64    `json:"invalid"`
	Policy         map[string]int64    `json:"policy"`
	Partitions     int                 `json:"partitions"`
	Replicas       int16               `json:"replicas"`
	Codecs         []string            `json:"codecs"`
	DryRunsMake    bool                `json:"dry_runs_make"`
	DryRunsAreBare bool                `json:"dry_runs_are_bare"`
	StrictGrowth   bool                `json:"strict_growth"`
	Denied         [][2]string         `json:"denied"`
	ShortEnds      bool                `json:"short_ends"`
	Broker         map[string]string   `json:"broker"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return fmt.Errorf("one argument: the kind of broker, as JSON")
	}
	var kind Kind
	given := json.NewDecoder(bytes.NewReader([]byte(os.Args[1])))
	given.DisallowUnknownFields()
	if err := given.Decode(&kind); err != nil {
		return fmt.Errorf("the kind of broker: %w", err)
	}
	rules, err := newRules(kind)
	if err != nil {
		return err
	}
	options := []kfake.Opt{
		kfake.Ports(kind.Ports...),
		kfake.ListenFn(func(network, address string) (net.Listener, error) {
			inner, err := net.Listen(network, address)
			return listener{inner, rules}, err
		}),
		kfake.GroupMinSessionTimeout(time.Millisecond),
		kfake.BrokerConfigs(kind.Broker),
		kfake.WithLogger(kfake.BasicLogger(os.Stderr, kfake.LogLevelInfo)),
	}
	if len(kind.Denied) > 0 {
		rules, err := accessRules(kind.Denied)
		if err != nil {
			return err
		}
		options = append(options, kfake.EnableSASL(), kfake.EnableACLs(),
			kfake.Superuser("PLAIN", "admin", "admin"), kfake.User("PLAIN", "user", "user", rules...))
	}
	if kind.Data != "" {
		options = append(options, kfake.DataDir(kind.Data))
	}
	if kind.Release != "" {
		release := kversion.FromString(kind.Release)
		if release == nil {
			return fmt.Errorf("no release of Kafka: %q", kind.Release)
		}
		options = append(options, kfake.MaxVersions(release))
	}
	cluster, err := kfake.NewCluster(options...)
	if err != nil {
		return err
	}
	rules.serve(cluster)
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	cluster.Close()
	return nil
}

// accessRules let the user do everything but what is denied. Create is on topics alone: on the cluster it is for all.
func accessRules(denied [][2]string) ([]kfake.ACL, error) {
	topics, groups, ids := kmsg.ACLResourceTypeTopic, kmsg.ACLResourceTypeGroup, kmsg.ACLResourceTypeTransactionalId
	var rules []kfake.ACL
	add := func(resource kmsg.ACLResourceType, operation kmsg.ACLOperation, allow bool) {
		rules = append(rules, kfake.ACL{
			Resource: resource, Name: "*", Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: operation, Allow: allow,
		})
	}
	for _, resource := range []kmsg.ACLResourceType{topics, groups, ids} {
		add(resource, kmsg.ACLOperationAll, true)
	}
	for _, right := range denied {
		resource, err := kmsg.ParseACLResourceType(right[0])
		if err != nil {
			return nil, err
		}
		operation, err := kmsg.ParseACLOperation(right[1])
		if err != nil {
			return nil, err
		}
		add(resource, operation, false)
	}
	return rules, nil
}
