from featherbed.server.app import create_app as create_app
from featherbed.server.catalog import Catalog as Catalog
from featherbed.server.catalog import ServedModel as ServedModel
from featherbed.server.process import ServerSettings as ServerSettings
from featherbed.server.process import run_server as run_server
from featherbed.server.requests import Limits as Limits
