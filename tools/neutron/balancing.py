"""Runs the API of Octavia in one process, without a worker.

A provider that does nothing stands in for those that make load balancers: what a request leaves pending is done as soon as the
request is answered. Octavia itself makes the ports of VIPs in Neutron. Argument: the folder of octavia.conf.
"""
import sys
from wsgiref import simple_server

from octavia.api import app
from octavia.api.drivers.noop_driver import driver
from octavia.common import constants
from octavia.db import api as db_api
from octavia.db import base_models
from octavia.db import models
from octavia_lib.api.drivers import exceptions
from oslo_config import cfg

arguments = ["octavia", "--config-file", sys.argv[1] + "/octavia.conf"]


def leave_ports_to_octavia(*_):
    raise exceptions.NotImplementedError()


driver.NoopProviderDriver.create_vip_port = leave_ports_to_octavia


def make_tables(engine):
    """Tables, and the names that columns of theirs refer to, as Octavia's migrations make them."""
    base_models.BASE.metadata.create_all(engine)
    with engine.begin() as connection:
        for model, names in (
            (models.ProvisioningStatus, constants.SUPPORTED_PROVISIONING_STATUSES),
            (models.OperatingStatus, constants.SUPPORTED_OPERATING_STATUSES),
            (models.Protocol, constants.SUPPORTED_PROTOCOLS),
            (models.LBTopology, constants.SUPPORTED_LB_TOPOLOGIES),
            (models.ClientAuthenticationMode, constants.SUPPORTED_CLIENT_AUTH_MODES),
        ):
            connection.execute(model.__table__.insert().prefix_with("OR IGNORE"), [{"name": name} for name in names])


def finish(engine):
    """Does what the API left to the provider."""
    with engine.begin() as connection:
        for model in (models.Listener, models.LoadBalancer):
            table = model.__table__
            status, pending = table.c.provisioning_status, table.c.provisioning_status.like("PENDING_%")
            if model is models.Listener:
                connection.execute(table.delete().where(status == constants.PENDING_DELETE))
            connection.execute(table.update().where(status == constants.PENDING_DELETE).values(provisioning_status=constants.DELETED))
            for enabled, operating in ((True, constants.ONLINE), (False, constants.OFFLINE)):
                connection.execute(table.update().where(pending, table.c.enabled == enabled).values(
                    provisioning_status=constants.ACTIVE, operating_status=operating))


def finishing(app, engine):
    """The application, with a provider that finishes after each change."""
    def serve(environ, start_response):
        answer = list(app(environ, start_response))
        if environ["REQUEST_METHOD"] != "GET":
            finish(engine)
        return answer
    return serve


api = app.setup_app(argv=arguments)
engine = db_api.get_engine()
make_tables(engine)
simple_server.make_server(cfg.CONF.api_settings.bind_host, cfg.CONF.api_settings.bind_port, finishing(api, engine)).serve_forever()
