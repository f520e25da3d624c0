"""Log lines of the server: text for people, or one JSON object a line for programs. Both go to stderr."""

import logging
import sys
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

LogFormat = Literal["text", "json"]
FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure_logging(log_format: LogFormat) -> None:
    """Sends everything from INFO on to stderr. JSON lines have time, level, logger, message, and a call's fields."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
        formatter: logging.Formatter = JsonFormatter(FIELDS, rename_fields=renamed, datefmt="%Y-%m-%dT%H:%M:%S%z")
    else:
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
