"""Makes Neutron's tables in an SQLite database, and notes that they are up to date. Arguments: the database, a host.

The host has an agent that is never late to say that it lives, so that ports of servers there are bound.

neutron-db-manage cannot do it: its migrations alter constraints, which SQLite has no statement for.
"""
import sys

import eventlet

eventlet.monkey_patch()

import sqlalchemy
from alembic.script import ScriptDirectory
from neutron.db.migration import cli
from neutron.db.migration.models import head

engine = sqlalchemy.create_engine(sys.argv[1])
head.get_metadata().create_all(engine)
heads = ScriptDirectory.from_config(cli.get_neutron_config()).get_heads()
with engine.begin() as connection:
    connection.execute(sqlalchemy.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
    for version in heads:
        connection.execute(sqlalchemy.text("INSERT INTO alembic_version VALUES (:version)"), {"version": version})
    connection.execute(sqlalchemy.text(
        "INSERT INTO agents (id, agent_type, binary, topic, host, created_at, started_at, heartbeat_timestamp, configurations)"
        " VALUES ('33333333-3333-3333-3333-333333333333', 'Open vSwitch agent', 'neutron-openvswitch-agent', 'N/A', :host, '2026-01-01 00:00:00', '2026-01-01 00:00:00', '2099-01-01 00:00:00', '{}')"
    ), {"host": sys.argv[2]})
