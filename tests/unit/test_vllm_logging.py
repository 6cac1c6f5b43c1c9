"""vLLM configures logging for itself; the log handlers of others go on."""

from __future__ import annotations

import logging
import logging.config
from logging.handlers import MemoryHandler

from mempipe.engines.vllm_settings import kept_log_targets


def test_a_buffering_handler_still_writes_after_logging_was_configured(tmp_path):
    """As Ray Serve's does, whose file the controller asks each replica for."""
    target = logging.FileHandler(tmp_path / "log")
    handler, logger = MemoryHandler(capacity=1, target=target), logging.getLogger("of a service")
    logger.addHandler(handler)
    try:
        with kept_log_targets():
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
            assert handler.target is None  # Python closed it
            logger.error("meanwhile")
        assert handler.target is target and target.baseFilename == str(tmp_path / "log")
        logger.error("afterwards")
        assert (tmp_path / "log").read_text() == "meanwhile\nafterwards\n" and not handler.buffer
    finally:
        logger.removeHandler(handler)
        target.close()
