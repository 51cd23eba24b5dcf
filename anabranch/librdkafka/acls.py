"""Brokers' rules of access, as librdkafka has them and as `anabranch.topics.rights` does."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from anabranch.topics.rights import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, Acl, Right

_KINDS = {
    TOPIC: ResourceType.TOPIC,
    GROUP: ResourceType.GROUP,
    TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
    CLUSTER: ResourceType.BROKER,  # librdkafka's name of it
}
_WORDS = {kind: word for word, kind in _KINDS.items()}
_OPERATIONS = {one.name.replace("_", "").lower(): one for one in AclOperation}


def binding_of(acl: Acl) -> AclBinding:
    """The rule for librdkafka."""
    right = acl.right
    return AclBinding(
        _KINDS[right.kind],
        right.name,
        ResourcePatternType.PREFIXED if right.prefixed else ResourcePatternType.LITERAL,
        acl.principal,
        "*",
        _OPERATIONS[right.operation.lower()],
        AclPermissionType.ALLOW if acl.allowed else AclPermissionType.DENY,
    )


def acl_of(found: AclBinding) -> Acl | None:
    """The rule for people; None of a kind that anabranch knows nothing of."""
    if found.restype not in _WORDS:
        return None
    name = AclOperation(found.operation).name
    operation = "".join(word.capitalize() for word in name.split("_"))
    prefixed = found.resource_pattern_type == ResourcePatternType.PREFIXED
    right = Right(_WORDS[found.restype], found.name, operation, "", prefixed)
    return Acl(found.principal, right, found.permission_type == AclPermissionType.ALLOW)


def everything() -> AclBindingFilter:
    """A filter that finds all rules."""
    every: Callable[..., AclBindingFilter] = AclBindingFilter  # its annotations know no None
    any_pattern, any_permission = ResourcePatternType.ANY, AclPermissionType.ANY
    return every(ResourceType.ANY, None, any_pattern, None, None, AclOperation.ANY, any_permission)
