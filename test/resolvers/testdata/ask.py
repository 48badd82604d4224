# SPDX-License-Identifier: Apache-2.0
"""Asks a DNS server by a connected socket; prints whom the socket is connected to, whom it hears, and the A record."""
import socket
import sys

server = sys.argv[1]
family = socket.AF_INET6 if ":" in server else socket.AF_INET
client = socket.socket(family, socket.SOCK_DGRAM)
client.settimeout(10)
client.connect((server, 53))
client.send(b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0" + b"\4name\4test\0" + b"\0\1\0\1")
answer, heard = client.recvfrom(512)
print("connected to", *client.getpeername()[:2])
print("heard", *heard[:2])
print("answer", socket.inet_ntoa(answer[-4:]))
