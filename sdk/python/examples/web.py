"""A web server of the standard library that is reached by name, and a client of the standard library.

Run: python3 web.py serve web.shop; python3 web.py get web.shop /
"""

import http.client
import http.server
import sys

import margay


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"hello {self.client_address}, this is {self.path}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(name: str) -> None:
    with http.server.ThreadingHTTPServer(("localhost", 0), Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = margay.listen(name)
        print(f"serving {name}", flush=True)
        server.serve_forever()


def get(name: str, path: str) -> None:
    connection = http.client.HTTPConnection(name)
    connection.sock = margay.connect(name, timeout=20)
    connection.request("GET", path)
    print(connection.getresponse().read().decode(), end="")


match sys.argv[1:]:
    case ["serve", name]:
        serve(name)
    case ["get", name, path]:
        get(name, path)
    case _:
        sys.exit("usage: web.py serve NAME | get NAME PATH")
