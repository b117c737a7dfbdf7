"""Runs all of Nova in one process: its API, conductor, scheduler and a compute node with the fake driver, and Placement.

They talk by a queue in memory, so there is none to install. Tables are made where they are missing. Images come from a
stand-in for Glance that has one. Arguments: the folder of nova.conf and placement.conf; the address and the port of the API,
which is the last to listen; the port of the other two.
"""
import json
import sys

import nova.monkey_patch  # noqa: before anything else

import eventlet
import os_vif
import sqlalchemy
from eventlet import wsgi
from keystonemiddleware import auth_token
from nova import config, context, objects, service
from nova.api import auth
from nova.api.openstack import FaultWrapper, compute
from nova.compute import rpcapi as compute_rpc
from nova.conductor import rpcapi as conductor_rpc
from nova.conf import CONF
from nova.db.api import api as api_db, models as api_models
from nova.db.main import api as main_db, models as main_models
from nova.objects import host_mapping
from nova.scheduler import rpcapi as scheduler_rpc
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils
from placement import conf as placement_conf, db_api as placement_db, deploy
from placement.db.sqlalchemy import models as placement_models

folder, address, port, inner_port = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


def make_tables(connection, models):
    models.BASE.metadata.create_all(sqlalchemy.create_engine(connection))


def make_cells(admin):
    """The two cells that every Nova has, of which the first is for servers that found no place, and a flavor.

    Where they are is written anew, and when services were last seen: the databases may be old copies of another folder's.
    """
    main = CONF.database.connection
    known = {cell.uuid: cell for cell in objects.CellMappingList.get_all(admin)}
    for number, uuid, url, connection in (
        (0, objects.CellMapping.CELL0_UUID, "none:///", main.replace("nova.db", "nova0.db")),
        (1, "11111111-1111-1111-1111-111111111111", "fake://", main),
    ):
        make_tables(connection, main_models)
        if uuid in known:
            known[uuid].database_connection = connection
            known[uuid].save()
        else:
            objects.CellMapping(admin, uuid=uuid, name="cell%d" % number, transport_url=url, database_connection=connection).create()
    for seen in objects.ServiceList.get_all(admin):
        seen.last_seen_up = timeutils.utcnow()
        seen.save()
    if not known:
        objects.Flavor(
            admin, flavorid="1", name="small", memory_mb=64, vcpus=1, root_gb=1, ephemeral_gb=0, swap=0, is_public=True, rxtx_factor=1.0, extra_specs={},
        ).create()


def placement():
    conf = cfg.ConfigOpts()
    placement_conf.register_opts(conf)
    conf(args=[], project="placement", default_config_files=[folder + "/placement.conf"])
    placement_db.configure(conf)
    make_tables(conf.placement_database.connection, placement_models)
    return deploy.loadapp(conf)


IMAGE = {
    "id": "22222222-2222-2222-2222-222222222222", "name": "nothing", "status": "active", "visibility": "public", "min_disk": 0, "min_ram": 0,
    "size": 0, "disk_format": "raw", "container_format": "bare", "checksum": None, "owner": None, "protected": False, "tags": [],
    "created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z", "schema": "/v2/schemas/image",
}


def images(environ, start_response):
    """As much of Glance as Nova asks for: what an image looks like, and the one that there is."""
    answer = IMAGE
    if environ["PATH_INFO"].startswith("/v2/schemas"):
        answer = {"name": "image", "properties": {key: {} for key in IMAGE}, "additionalProperties": {"type": "string"}}
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]


def below(apps):
    """An application that has each of apps below a path."""
    def serve(environ, start_response):
        for path, app in apps.items():
            if environ["PATH_INFO"].startswith(path):
                environ["SCRIPT_NAME"] += path
                environ["PATH_INFO"] = environ["PATH_INFO"][len(path):] or "/"
                return app(environ, start_response)
        start_response("404 Not Found", [])
        return [b""]
    return serve


def listen(on, app):
    eventlet.spawn(wsgi.server, eventlet.listen((address, on)), app, log.getLogger("wsgi"))


config.parse_args(["nova", "--config-file", folder + "/nova.conf"])
log.setup(CONF, "nova")
objects.register_all()
os_vif.initialize()
make_tables(CONF.api_database.connection, api_models)
admin = context.get_admin_context()
make_cells(admin)
listen(inner_port, below({"/placement": placement(), "/image": images}))
for binary, rpc in (("nova-conductor", conductor_rpc), ("nova-scheduler", scheduler_rpc), ("nova-compute", compute_rpc)):
    service.Service.create(binary=binary, topic=rpc.RPC_TOPIC).start()
host_mapping.discover_hosts(admin)
api = auth.NovaKeystoneContext(FaultWrapper(compute.APIRouterV21.factory({})))
listen(port, below({"/v2.1": auth_token.AuthProtocol(api, {"oslo_config_config": CONF})}))
eventlet.event.Event().wait()
