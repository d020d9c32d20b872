"""The picture of a report in the README: trained, written and looked at again by `make pictures`."""

import base64
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.app.cli.calling import call
from tests.app.report import browser

COMMANDS = "fit digits --net lenet5 --out {0}", "evaluate {0} --ood photos"
COMMANDS += "compress {0}", "report {0}"
WIDTH, HEIGHT = 1280, 980


def taken(page, target):
    """Write what a browser shows of the beginning of a page as a PNG file."""
    with browser.page(tempfile.mkdtemp()) as tab:
        tab.open(page.resolve().as_uri(), WIDTH)
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
        shot = tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    seen = Image.open(io.BytesIO(base64.b64decode(shot["data"])))
    seen.convert("RGB").quantize(128).save(target, optimize=True)


if __name__ == "__main__":
    if browser.CHROMIUM is None:
        sys.exit("Expected Debian's chromium, but it is not there. Run `apt-get install chromium`.")
    run = Path(tempfile.mkdtemp()) / "digits"
    for command in COMMANDS:
        assert call(*command.format(run).split()) == 0
    taken(run / "report.html", Path(__file__).parents[3] / "docs" / "report.png")
