"""Google Cloud Storage in memory, as much of its JSON API as gcsfs, Orbax and TensorStore ask for in a small run.

Run it by itself, with BUCKET as its one bucket: python -m tests.training.fake_gcs BUCKET PORT
"""

import itertools
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

PATH = re.compile(r"/(?:upload/|download/)?storage/v1/b/([^/]+)(?:/o(?:/([^/]+)(?:/moveTo/o/([^/]+))?)?)?")


class FakeGCS(ThreadingHTTPServer):
    """A server on loopback with one bucket; `objects` are (content, generation) by name."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, bucket: str, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.bucket, self.objects = bucket, {}
        self.generations, self.uploads, self.parts = itertools.count(1), itertools.count(), {}
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """Says nothing of clients that hang up: gcsfs asks in two ways at once and takes the first answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def environment(self) -> dict[str, str]:
        """What sends the clients here instead of to Google, without a login."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is sent as one

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query))
        bucket, name, target = (part and unquote(part) for part in PATH.fullmatch(address.path).groups())
        with self.server.lock:
            if bucket != self.server.bucket:
                self.answer(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
            elif self.command == "POST" and target is None:
                self.put(query, body)
            elif name is None:
                self.answer(200, self.listing(query) if address.path.endswith("/o") else {"name": bucket})
            elif name not in self.server.objects:
                self.answer(404, {"error": {"code": 404, "message": f"No such object: {name}"}})
            elif target is not None:
                self.store(target, self.server.objects.pop(name)[0])
                self.answer(200, self.about(target))
            elif not self.allowed(query, name):
                self.answer(304 if self.command == "GET" and "ifGenerationNotMatch" in query else 412, {})
            elif self.command == "DELETE":
                del self.server.objects[name]
                self.answer(204, b"")
            elif query.get("alt") == "media":
                self.read(*self.server.objects[name])
            else:
                self.answer(200, self.about(name))

    do_GET = do_POST = do_DELETE = handle_request

    def put(self, query: dict, body: bytes) -> None:
        name = query.get("name")
        if query["uploadType"] == "multipart":
            boundary = re.search('boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            _, about, content = body.split(b"--" + boundary, 2)
            name = json.loads(re.split(rb"\r?\n\r?\n", about, maxsplit=1)[1])["name"]
            body = re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1]
            body = re.sub(rb"\r?\n--" + re.escape(boundary) + rb"--\s*$", b"", body)
        elif query["uploadType"] == "resumable":
            if "upload" not in query:
                self.answer(
                    200, {}, {"Location": f"{self.server.address}{self.path}&upload={next(self.server.uploads)}"}
                )
                return
            body = self.server.parts[query["upload"]] = self.server.parts.get(query["upload"], b"") + body
            if self.headers["Content-Range"].endswith("/*"):
                self.answer(308, {}, {"Range": f"bytes=0-{len(body) - 1}"})
                return
        if not self.allowed(query, name):
            self.answer(412, {})
            return
        self.store(name, body)
        self.answer(200, self.about(name))

    def store(self, name: str, content: bytes) -> None:
        self.server.objects[name] = (content, next(self.server.generations))

    def allowed(self, query: dict, name: str) -> bool:
        """Whether the object's generation, 0 where there is none, is the one that a condition asks for."""
        generation = str(self.server.objects.get(name, (b"", 0))[1])
        wanted, unwanted = query.get("ifGenerationMatch", generation), query.get("ifGenerationNotMatch")
        return generation == wanted and generation != unwanted

    def about(self, name: str) -> dict:
        content, generation = self.server.objects[name]
        return {"name": name, "bucket": self.server.bucket, "size": str(len(content)), "generation": str(generation)}

    def listing(self, query: dict) -> dict:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first, end = query.get("startOffset", ""), query.get("endOffset")
        items, prefixes = [], {}
        for name in sorted(self.server.objects):
            if name.startswith(prefix) and name >= first and (not end or name < end):
                folder, more, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
                if more:
                    prefixes[prefix + folder + more] = True
                else:
                    items.append(self.about(name))
        return {"items": items, "prefixes": list(prefixes)}

    def read(self, content: bytes, generation: int) -> None:
        size, asked = len(content), re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        headers = {"x-goog-generation": str(generation)}
        if asked is None:
            self.answer(200, content, headers)
            return
        first = int(asked[1]) if asked[1] else max(size - int(asked[2]), 0)
        last = min(int(asked[2]), size - 1) if asked[1] and asked[2] else size - 1
        if first > last:
            self.answer(416, b"", headers)
        else:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            self.answer(206, content[first : last + 1], headers)

    def answer(self, code: int, content: bytes | dict, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if code not in (204, 304):
            self.wfile.write(body)

    def log_message(self, *words) -> None:
        """Says nothing."""


if __name__ == "__main__":
    FakeGCS(sys.argv[1], int(sys.argv[2])).serve_forever()
