"""Images that would cost much, and files that are none, to a server whose model sees."""

import base64
import io
from collections.abc import Iterator

from PIL import Image

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.bystander import Bystander
from scripts.attacking.target import Target

SEES = ("--model", "demo_vision", "--allowed-media-domains", "*")
MOST_SECONDS = 5.0


def _file(format: str, width: int, height: int, mode: str = "1", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (width, height)).save(stream, format, **options)
    return stream.getvalue()


def _urls() -> Iterator[tuple[str, str]]:
    files = {
        "PNG of 400 million pixels": _file("PNG", 20_000, 20_000),
        "GIF of 400 million pixels": _file("GIF", 20_000, 20_000, "L"),
        "TIFF of 400 million pixels": _file("TIFF", 20_000, 20_000, compression="tiff_lzw"),
        "WebP of 256 million pixels": _file("WEBP", 16_000, 16_000, "RGB"),
        "a line": _file("PNG", 60_000, 2),
        "half a JPEG": _file("JPEG", 900, 900, "RGB")[:900],
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>",
        "zeros": bytes(1 << 20),
    }
    for name, file in files.items():
        yield name, "data:image/png;base64," + base64.b64encode(file).decode()
    yield "20 MB of no base64", "data:image/png;base64," + "!" * 20_000_000
    for address in (
        "127.0.0.1",
        "localhost",
        "[::1]",
        "169.254.169.254",
        "0x7f.1",
        "2130706433",
        "10.0.0.1",
        "[::ffff:127.0.0.1]",
    ):
        yield address, f"http://{address}/a.png"
    yield "file", "file:///etc/passwd"


@attack("high", "images that are bombs, none, or behind private addresses")
def hostile_images(target: Target, seen: Seen) -> None:
    server = target.server(*SEES)
    wrong, slow, count = [], [], 0
    engine = server.pids("engine.process")
    with Bystander(server) as other:
        for name, url in _urls():
            count += 1
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
            answer = wire.post(server, wire.CHAT, body, seconds=30)
            if answer.status not in (400, 413):  # others say that something was fetched
                wrong.append(f"{name}: {answer.status}")
            if answer.seconds > MOST_SECONDS:
                slow.append(f"{name}: {answer.seconds:.1f} s")
        good = {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _good()}}]}],
            "max_tokens": 4,
        }
        seen.status("an image afterwards", wire.post(server, wire.CHAT, good, seconds=30).status, 200, 200)
    seen.none_of("not refused at once", wrong, count)
    seen.none_of(f"slower than {MOST_SECONDS:g} s", slow, count)
    seen.equal("the engine", server.pids("engine.process"), engine)
    other.judge(seen)


def _good() -> str:
    return "data:image/png;base64," + base64.b64encode(_file("PNG", 96, 96, "RGB")).decode()
