"""HTTP servers on loopback for the tests of remote models: one that misbehaves as told, and a real one for a model in a folder."""
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """What the server does with one request. `how`: send it, `drop` the connection, send `half` of it, or `stall` until closed."""

    status: int = 200
    body: object = b""
    headers: dict = field(default_factory=dict)
    delay: float = 0.0
    how: str = "send"

    def content(self):
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict
    body: dict


def chat(*texts, **choice):
    """A chat completion with these texts."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice} for text in texts]}


def chat_error(message, **fields):
    return {"error": {"message": message, **fields}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.on_time():
            reply = self.server.next_reply(Seen(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            self.server.closing.wait(reply.delay)
            try:
                self.respond(reply)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    def respond(self, reply):
        content = reply.content()
        if reply.how == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if reply.how == "stall":
            self.server.closing.wait(60)
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in {"content-type": "application/json", "content-length": str(len(content)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if reply.how == "half":
            self.wfile.write(content[:len(content) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        else:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    """Plays a script: a list of replies (the last one repeats), or a function of the request. Remembers what it saw."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.lock, self.closing = script, [], threading.Lock(), threading.Event()
        self.at_once = self.most_at_once = 0
        self.full = threading.Event()
        self.full_at = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1/answers"

    def until_full(self, places):
        """Hold the answer back until so many requests are there at once (for 10 s at most)."""
        with self.lock:
            self.full_at = places
            if self.at_once >= places:
                self.full.set()
        self.full.wait(10)

    def next_reply(self, seen):
        with self.lock:
            self.seen.append(seen)
            number = len(self.seen)
        reply = self.script(seen) if callable(self.script) else self.script[min(number, len(self.script)) - 1]
        return reply if isinstance(reply, Reply) else Reply(body=reply)

    @contextmanager
    def on_time(self):
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            if self.full_at and self.at_once >= self.full_at:
                self.full.set()
        try:
            yield
        finally:
            with self.lock:
                self.at_once -= 1

    def handle_error(self, request, client_address):
        pass


@contextmanager
def serving(script):
    """A running server that plays `script`."""
    server = Server(script)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def model_server(folder, log, patience=120):
    """`transformers serve` for a model folder; gives its address. It is stopped at the end; `log` is a file for what it says."""
    port = free_port()
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    with open(log, "w") as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, log, time.monotonic() + patience)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(address, process, log, end):
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the model server did not start: {open(log).read()[-2000:]}")
