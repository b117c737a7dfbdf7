"""Runs neutron-server, which tries a transaction again if SQLite refuses it because another one writes.

Neutron does so for databases that report a deadlock. With OVN it writes from several processes and green threads.
"""
import sys

from neutron.cmd.eventlet.server import main  # first, because it patches modules
from oslo_db import exception
from oslo_db.sqlalchemy import exc_filters
from sqlalchemy import exc


@exc_filters.filters("sqlite", exc.OperationalError, r"(?s).*database is locked")
def locked(error, match, engine_name, is_disconnect):
    raise exception.DBDeadlock(error)


sys.exit(main())
