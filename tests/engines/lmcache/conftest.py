"""What LMCache needs to be imported in tests whose warnings are errors, and where these tests' own modules are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config):
    # LMCache's and its dependencies' own; ours stay errors.
    for warning in (
        "ignore:`LoggingHandler` in `opentelemetry-sdk`:DeprecationWarning",
        "ignore:.*:DeprecationWarning:lmcache",
        "ignore:.*:DeprecationWarning:torch",
    ):
        config.addinivalue_line("filterwarnings", warning)
