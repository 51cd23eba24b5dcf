"""Kafka topics: their names, declared settings and rights, and the code that creates, grows and alters them.

- ``names``: names of topics, groups and transactional ids; no other module spells them.
- ``declarations``: the settings of each kind of topic, as data, each with its reason. Start here.
- ``creation``: creates, grows, alters and checks topics by these declarations. ``new_topics`` deletes or names
  the topics of a creation that failed.
- ``rights``: the ACLs that clients, readers and controllers need, as data.

The code reaches brokers by the port `anabranch.ports.Log` only, so it runs against memory, too. This folder may
import the core, schemas, ports and errors.
"""
