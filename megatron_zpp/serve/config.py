"""The flags of the server."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Section):
    """Where the server listens, and how much it takes on"""

    host: str = flag("127.0.0.1", "address to listen at; 0.0.0.0: every one of this machine")
    port: int = flag(8000, "port to listen at; 0: any that is free", minimum=0, maximum=65535)
    max_texts: int = flag(8, "texts that one request may ask for", minimum=1)
    max_waiting: int = flag(16, "requests that may wait while one runs", minimum=0)
