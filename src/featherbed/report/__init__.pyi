from featherbed.report.anchors import inspect_anchors as inspect_anchors
from featherbed.report.ratings import ratings_page as ratings_page
from featherbed.report.texts import language_page as language_page
from featherbed.report.texts import text_page as text_page
