"""A page that is being served, asked as a browser would ask."""

import http.client
import json
from urllib.parse import urlencode, urlsplit


class Served:
    """A page that is being served."""

    def __init__(self, address):
        self.address = address
        parts = urlsplit(address)
        self.port, self.token = parts.port, parts.query.removeprefix("token=")

    def get(self, path, host="127.0.0.1", method="GET"):
        """Status, headers and body of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def ask(self, question, **query):
        """What the server answers to the page."""
        status, _, body = self.get(f"/{self.token}/api/{question}?{urlencode(query)}")
        assert status == 200, body
        return json.loads(body)
