"""What tests of the page share: a browser whose microphone plays a recording, and servers."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import soundfile
from playwright.sync_api import Browser, sync_playwright

from antiphon.loading import Running
from antiphon.server.run import BuildApp, loaded
from page.tabs import Tab, seeded
from server.servers import RunningServer, StartServer, running_server, tiny_settings

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "google-chrome")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Its microphone plays the example again and again; its camera shows a picture that moves.

    Of one module: as long as it is there, its event loop is that of the thread, and other tests cannot have theirs.
    """
    found = [path for name in BROWSERS if (path := shutil.which(name)) is not None]
    assert found, "the page is tested in a browser: `make browser` installs one"
    recording = tmp_path_factory.mktemp("microphone") / "caller.wav"
    samples, rate_hz = soundfile.read(ROOT / "examples" / "caller.flac", dtype="int16")
    soundfile.write(recording, samples, rate_hz)
    flags = [
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={recording}",
        "--auto-select-desktop-capture-source=Entire screen",
        "--host-resolver-rules=MAP insecure.test 127.0.0.1",
        "--no-sandbox",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=flags)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def _one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests of other workers wait: sound is played in real time, and two of these want more than a small machine."""
    with (tmp_path_factory.getbasetemp().parent / "browser.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """In English, on a desk, in the light."""
    context = browser.new_context(
        locale="en-US", viewport={"width": 1280, "height": 900}, color_scheme="light", accept_downloads=True
    )
    tab = Tab(context.new_page())
    tab.watch()
    yield tab
    context.close()
    tab.check()


@pytest.fixture(scope="session")
def engine(tiny_checkpoint: Path) -> Iterator[Running]:
    with loaded(tiny_settings(tiny_checkpoint), lambda _: None) as running:
        yield running


@pytest.fixture(scope="session")
def running(tiny_checkpoint: Path, engine: Running) -> Iterator[RunningServer]:
    """A server for every test that needs no other one; its calls all draw from the same seed."""
    with running_server(tiny_settings(tiny_checkpoint), engine, seeded) as running:
        yield running


@pytest.fixture
def start_server(tiny_checkpoint: Path, engine: Running) -> StartServer:
    """`with start_server(seeded, max_calls_per_key="1") as running:`."""

    def start(build: BuildApp, **options: str) -> AbstractContextManager[RunningServer]:
        return running_server(tiny_settings(tiny_checkpoint, **options), engine, build)

    return start


@pytest.fixture
def load_server(tiny_checkpoint: Path) -> StartServer:
    """The same with an engine of its own, for options that are the engine's."""

    @contextmanager
    def start(build: BuildApp, **options: str) -> Iterator[RunningServer]:
        settings = tiny_settings(tiny_checkpoint, **options)
        with loaded(settings, lambda _: None) as engine, running_server(settings, engine, build) as running:
            yield running

    return start


@pytest.fixture
def modules(tab: Tab, running: RunningServer) -> Tab:
    """A tab of which only the modules are used, without a call."""
    tab.page.goto(running.url)
    return tab
