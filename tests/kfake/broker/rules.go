package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

var codecs = []string{"none", "gzip", "snappy", "lz4", "zstd"} // by their numbers in a batch

const (
	attributesAt = 21 // of a batch
	recordsAt    = 57
	latest       = -1
)

type place struct {
	topic     string
	partition int32
}

// rules judge requests, and change answers, so that the cluster looks like a broker of the kind.
type rules struct {
	kind     Kind
	versions map[int16][2]int16
	refused  map[int16]bool
	lock     sync.Mutex
	cluster  *kfake.Cluster
	made     map[string]int     // partitions of the topics that were made here
	newest   map[place][2]int64 // base and end of the batch that was acknowledged last
}

func newRules(kind Kind) (*rules, error) {
	r := &rules{
		kind:     kind,
		versions: make(map[int16][2]int16),
		refused:  make(map[int16]bool),
		made:     make(map[string]int),
		newest:   make(map[place][2]int64),
	}
	keys := make(map[string]int16)
	for key := int16(0); key <= kmsg.MaxKey; key++ {
		keys[kmsg.NameForKey(key)] = key
	}
	for name, pair := range kind.Versions {
		key, known := keys[name]
		if !known {
			return nil, fmt.Errorf("no call: %q", name)
		}
		r.versions[key] = pair
	}
	for _, name := range kind.Refused {
		key, known := keys[name]
		if !known {
			return nil, fmt.Errorf("no call: %q", name)
		}
		r.refused[key] = true
	}
	for _, name := range kind.Codecs {
		if !slices.Contains(codecs, name) {
			return nil, fmt.Errorf("no codec: %q", name)
		}
	}
	return r, nil
}

func (r *rules) serve(cluster *kfake.Cluster) {
	r.lock.Lock()
	defer r.lock.Unlock()
	r.cluster = cluster
}

// has says whether the topic has a partition of this number.
func (r *rules) has(topic string, partition int32) bool {
	r.lock.Lock()
	cluster := r.cluster
	r.lock.Unlock()
	return cluster != nil && cluster.LeaderFor(topic, partition) >= 0
}

func (r *rules) offers(key, version int16) bool {
	pair, limited := r.versions[key]
	if limited && key != apiVersions && (version < pair[0] || version > pair[1]) {
		return false
	}
	return !r.refused[key]
}

// judges says whether requests of this call are decoded at all.
func (r *rules) judges(key int16) bool {
	switch kmsg.Key(key) {
	case kmsg.ApiVersions, kmsg.CreateTopics, kmsg.DeleteTopics, kmsg.CreatePartitions:
		return true
	case kmsg.DescribeConfigs, kmsg.IncrementalAlterConfigs, kmsg.AlterConfigs:
		return true
	case kmsg.Produce:
		return r.kind.Codecs != nil || r.kind.ShortEnds
	case kmsg.ListOffsets, kmsg.Fetch:
		return r.kind.ShortEnds
	case kmsg.Metadata:
		return r.kind.Replicas > 0
	}
	return false
}

// request judges a request, and may change it. It returns the answer, or a change of the cluster's.
func (r *rules) request(request kmsg.Request) (kmsg.Response, func(kmsg.Response)) {
	switch asked := request.(type) {
	case *kmsg.ApiVersionsRequest:
		return nil, r.limitVersions
	case *kmsg.CreateTopicsRequest:
		return r.create(asked)
	case *kmsg.DeleteTopicsRequest:
		return nil, r.deleted
	case *kmsg.CreatePartitionsRequest:
		return r.grow(asked)
	case *kmsg.DescribeConfigsRequest:
		return nil, r.hideSettings
	case *kmsg.IncrementalAlterConfigsRequest:
		return r.alter(asked), nil
	case *kmsg.ProduceRequest:
		return r.produce(asked)
	case *kmsg.ListOffsetsRequest:
		return nil, r.shorten(asked)
	case *kmsg.FetchRequest:
		return nil, r.shortenFetch
	case *kmsg.MetadataRequest:
		return nil, r.replicate
	}
	return nil, nil
}

func (r *rules) limitVersions(response kmsg.Response) {
	answer := response.(*kmsg.ApiVersionsResponse)
	kept := answer.ApiKeys[:0]
	for _, call := range answer.ApiKeys {
		if pair, limited := r.versions[call.ApiKey]; limited {
			call.MinVersion = max(call.MinVersion, pair[0])
			call.MaxVersion = min(call.MaxVersion, pair[1])
		}
		if !r.refused[call.ApiKey] && call.MinVersion <= call.MaxVersion {
			kept = append(kept, call)
		}
	}
	answer.ApiKeys = kept
	if !r.kind.Features {
		answer.SupportedFeatures, answer.FinalizedFeatures = nil, nil
	}
}

// refusal of a setting: its code and text; code 0 if it is taken.
func (r *rules) refusal(name string, value *string) (int16, string) {
	if slices.Contains(r.kind.Unknown, name) {
		return kerr.InvalidConfig.Code, "Unknown topic config name: " + name
	}
	if value == nil {
		return 0, ""
	}
	number, is := amount(name, *value)
	if !is {
		return 0, ""
	}
	if most, is := r.kind.Policy[name]; is && number > most {
		return kerr.PolicyViolation.Code, fmt.Sprintf(
			"Config property '%s' with value '%s' exceeded max limit of %d.", name, *value, most)
	}
	if most, is := r.kind.Invalid[name]; is && number > most {
		return kerr.InvalidConfig.Code, fmt.Sprintf(
			"Invalid value %s for configuration %s: it must be at most %d", *value, name, most)
	}
	return 0, ""
}

// amount is a setting's value as a number. A retention of -1 is more than any other.
func amount(name, value string) (int64, bool) {
	number, err := strconv.ParseInt(value, 10, 64)
	if strings.HasPrefix(name, "retention.") && number < 0 {
		number = math.MaxInt64
	}
	return number, err == nil
}

func (r *rules) create(asked *kmsg.CreateTopicsRequest) (kmsg.Response, func(kmsg.Response)) {
	dry := asked.ValidateOnly
	asked.ValidateOnly = dry && !r.kind.DryRunsMake
	var refused []kmsg.CreateTopicsResponseTopic
	var passed []kmsg.CreateTopicsRequestTopic
	wanted := r.partitions()
	for _, topic := range asked.Topics {
		if r.kind.Replicas > 0 {
			topic.ReplicationFactor = -1
		}
		var code int16
		var text string
		for _, setting := range topic.Configs {
			if code, text = r.refusal(setting.Name, setting.Value); code != 0 {
				break
			}
		}
		wanted += int(topic.NumPartitions)
		if code == 0 && r.kind.Partitions > 0 && wanted > r.kind.Partitions {
			code = kerr.PolicyViolation.Code
			text = fmt.Sprintf("You may not create more than the maximum number of partitions (%d).", r.kind.Partitions)
		}
		if code == 0 || r.has(topic.Topic, 0) {
			passed = append(passed, topic)
			continue
		}
		answer := kmsg.NewCreateTopicsResponseTopic()
		answer.Topic, answer.ErrorCode, answer.ErrorMessage = topic.Topic, code, &text
		refused = append(refused, answer)
	}
	asked.Topics = passed
	finish := func(response kmsg.Response) {
		answer := response.(*kmsg.CreateTopicsResponse)
		for i := range answer.Topics {
			topic := &answer.Topics[i]
			if topic.ErrorCode == 0 && !asked.ValidateOnly {
				r.count(topic.Topic, passed)
			}
			if dry && r.kind.DryRunsAreBare {
				topic.NumPartitions, topic.ReplicationFactor, topic.Configs = -1, -1, nil
			}
			if r.kind.Replicas > 0 && topic.ReplicationFactor > 0 {
				topic.ReplicationFactor = r.kind.Replicas
			}
			// kfake shows them to all.
			if slices.Contains(r.kind.Denied, [2]string{"topic", "DescribeConfigs"}) {
				topic.NumPartitions, topic.ReplicationFactor, topic.Configs = -1, -1, nil
				topic.ConfigErrorCode = kerr.TopicAuthorizationFailed.Code
			}
			topic.Configs = r.shown(topic.Configs)
		}
		answer.Topics = append(answer.Topics, refused...)
	}
	if len(passed) == 0 && len(refused) > 0 {
		answer := asked.ResponseKind().(*kmsg.CreateTopicsResponse)
		finish(answer)
		return answer, nil
	}
	return nil, finish
}

func (r *rules) shown(settings []kmsg.CreateTopicsResponseTopicConfig) []kmsg.CreateTopicsResponseTopicConfig {
	return slices.DeleteFunc(settings, func(setting kmsg.CreateTopicsResponseTopicConfig) bool {
		return slices.Contains(r.kind.Hidden, setting.Name)
	})
}

func (r *rules) partitions() int {
	r.lock.Lock()
	defer r.lock.Unlock()
	count := 0
	for _, partitions := range r.made {
		count += partitions
	}
	return count
}

func (r *rules) count(topic string, asked []kmsg.CreateTopicsRequestTopic) {
	r.lock.Lock()
	defer r.lock.Unlock()
	for _, each := range asked {
		if each.Topic == topic {
			r.made[topic] = max(1, int(each.NumPartitions))
		}
	}
}

func (r *rules) deleted(response kmsg.Response) {
	r.lock.Lock()
	defer r.lock.Unlock()
	for _, topic := range response.(*kmsg.DeleteTopicsResponse).Topics {
		if topic.ErrorCode == 0 && topic.Topic != nil {
			delete(r.made, *topic.Topic)
		}
	}
}

// replicate shows as many replicas of each partition as the kind has, on brokers that need not be there.
func (r *rules) replicate(response kmsg.Response) {
	for _, topic := range response.(*kmsg.MetadataResponse).Topics {
		for i := range topic.Partitions {
			partition := &topic.Partitions[i]
			partition.Replicas = nil
			for n := range int32(r.kind.Replicas) {
				partition.Replicas = append(partition.Replicas, partition.Leader+n)
			}
			partition.ISR = partition.Replicas
		}
	}
}

// grow refuses what asks for no more partitions than there are. kfake would take the present number.
func (r *rules) grow(asked *kmsg.CreatePartitionsRequest) (kmsg.Response, func(kmsg.Response)) {
	var refused []kmsg.CreatePartitionsResponseTopic
	var passed []kmsg.CreatePartitionsRequestTopic
	for _, topic := range asked.Topics {
		answer := kmsg.NewCreatePartitionsResponseTopic()
		answer.Topic = topic.Topic
		switch {
		case r.has(topic.Topic, topic.Count-1):
			text := fmt.Sprintf("Topic already has %d partitions.", topic.Count)
			answer.ErrorCode = kerr.InvalidPartitions.Code
			if r.kind.StrictGrowth {
				text = "Partition count must be greater then current number of partitions"
				answer.ErrorCode = kerr.InvalidRequest.Code
			}
			answer.ErrorMessage = &text
			refused = append(refused, answer)
		default:
			passed = append(passed, topic)
		}
	}
	asked.Topics = passed
	if len(passed) == 0 {
		answer := asked.ResponseKind().(*kmsg.CreatePartitionsResponse)
		answer.Topics = refused
		return answer, nil
	}
	return nil, func(response kmsg.Response) {
		answer := response.(*kmsg.CreatePartitionsResponse)
		answer.Topics = append(answer.Topics, refused...)
	}
}

func (r *rules) hideSettings(response kmsg.Response) {
	answer := response.(*kmsg.DescribeConfigsResponse)
	for i := range answer.Resources {
		of := &answer.Resources[i]
		isTopic := of.ResourceType == kmsg.ConfigResourceTypeTopic
		kept := of.Configs[:0]
		for _, setting := range of.Configs {
			if isTopic && (slices.Contains(r.kind.Hidden, setting.Name) || slices.Contains(r.kind.Unknown, setting.Name)) {
				continue
			}
			if most, is := r.kind.Highest[setting.Name]; is && setting.Value != nil {
				if found, is := amount(setting.Name, *setting.Value); is && found > most {
					text := strconv.FormatInt(most, 10)
					setting.Value = &text
				}
			}
			kept = append(kept, setting)
		}
		of.Configs = kept
	}
}

func (r *rules) alter(asked *kmsg.IncrementalAlterConfigsRequest) kmsg.Response {
	answer := asked.ResponseKind().(*kmsg.IncrementalAlterConfigsResponse)
	wrong := false
	for _, of := range asked.Resources {
		each := kmsg.NewIncrementalAlterConfigsResponseResource()
		each.ResourceType, each.ResourceName = of.ResourceType, of.ResourceName
		for _, setting := range of.Configs {
			if code, text := r.refusal(setting.Name, setting.Value); code != 0 {
				each.ErrorCode, each.ErrorMessage = code, &text
				wrong = true
				break
			}
		}
		answer.Resources = append(answer.Resources, each)
	}
	if wrong {
		return answer
	}
	return nil
}

func (r *rules) produce(asked *kmsg.ProduceRequest) (kmsg.Response, func(kmsg.Response)) {
	records := make(map[place]int64)
	refused := false
	for _, topic := range asked.Topics {
		for _, partition := range topic.Partitions {
			batch := partition.Records
			if len(batch) < recordsAt+4 {
				continue
			}
			codec := int(binary.BigEndian.Uint16(batch[attributesAt:]) & 7)
			if r.kind.Codecs != nil && codec != 0 && !slices.Contains(r.kind.Codecs, codecs[codec]) {
				refused = true
			}
			records[place{topic.Topic, partition.Partition}] = int64(binary.BigEndian.Uint32(batch[recordsAt:]))
		}
	}
	if refused {
		return unsupportedCodec(asked), nil
	}
	if !r.kind.ShortEnds {
		return nil, nil
	}
	return nil, func(response kmsg.Response) {
		r.lock.Lock()
		defer r.lock.Unlock()
		for _, topic := range response.(*kmsg.ProduceResponse).Topics {
			for _, partition := range topic.Partitions {
				at := place{topic.Topic, partition.Partition}
				if partition.ErrorCode == 0 {
					r.newest[at] = [2]int64{partition.BaseOffset, partition.BaseOffset + records[at]}
				}
			}
		}
	}
}

func unsupportedCodec(asked *kmsg.ProduceRequest) kmsg.Response {
	answer := asked.ResponseKind().(*kmsg.ProduceResponse)
	for _, topic := range asked.Topics {
		each := kmsg.NewProduceResponseTopic()
		each.Topic, each.TopicID = topic.Topic, topic.TopicID
		for _, partition := range topic.Partitions {
			one := kmsg.NewProduceResponseTopicPartition()
			one.Partition, one.ErrorCode, one.BaseOffset = partition.Partition, kerr.UnsupportedCompressionType.Code, -1
			each.Partitions = append(each.Partitions, one)
		}
		answer.Topics = append(answer.Topics, each)
	}
	return answer
}

// short is an end as a broker reports it that takes the base of the last batch for its last record.
func (r *rules) short(topic string, partition int32, end int64) int64 {
	r.lock.Lock()
	defer r.lock.Unlock()
	batch, known := r.newest[place{topic, partition}]
	if known && end == batch[1] {
		return batch[0] + 1
	}
	return end
}

func (r *rules) shorten(asked *kmsg.ListOffsetsRequest) func(kmsg.Response) {
	ends := make(map[place]bool)
	for _, topic := range asked.Topics {
		for _, partition := range topic.Partitions {
			ends[place{topic.Topic, partition.Partition}] = partition.Timestamp == latest
		}
	}
	return func(response kmsg.Response) {
		for _, topic := range response.(*kmsg.ListOffsetsResponse).Topics {
			for i := range topic.Partitions {
				partition := &topic.Partitions[i]
				if ends[place{topic.Topic, partition.Partition}] {
					partition.Offset = r.short(topic.Topic, partition.Partition, partition.Offset)
				}
			}
		}
	}
}

func (r *rules) shortenFetch(response kmsg.Response) {
	for _, topic := range response.(*kmsg.FetchResponse).Topics {
		for i := range topic.Partitions {
			partition := &topic.Partitions[i]
			partition.HighWatermark = r.short(topic.Topic, partition.Partition, partition.HighWatermark)
			partition.LastStableOffset = r.short(topic.Topic, partition.Partition, partition.LastStableOffset)
		}
	}
}
