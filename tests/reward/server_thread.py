"""A reward server in this process, for tests."""

import asyncio
import threading

from likeness_reward.embedded import FaceScorer
from likeness_reward.server import RewardServer
from likeness_reward.settings import ServerSettings


class ServerThread:
    """A RewardServer on a free port, in a thread with an event loop of its own."""

    def __init__(self, scorer: FaceScorer, settings: ServerSettings) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.call(self._create(scorer, settings))
        self.endpoint = f"127.0.0.1:{self.call(self.server.start())}"

    async def _create(self, scorer: FaceScorer, settings: ServerSettings) -> RewardServer:
        return RewardServer(scorer, settings)

    def call(self, coroutine):  # type: ignore[no-untyped-def]
        """Returns what a coroutine returns on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def stop(self) -> None:
        """Stops the server as SIGTERM would."""
        self.call(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
