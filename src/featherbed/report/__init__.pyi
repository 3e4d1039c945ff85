from featherbed.report.anchors import inspect_anchors as inspect_anchors
from featherbed.report.page import FINE as FINE
from featherbed.report.page import bin_edges as bin_edges
from featherbed.report.page import bin_name as bin_name
from featherbed.report.ratings import ratings_page as ratings_page
from featherbed.report.texts import language_page as language_page
from featherbed.report.texts import text_page as text_page
