/* SPDX-License-Identifier: Apache-2.0 */

/* Prints the addresses of a name as the C library finds them: musl asks for A and AAAA by one socket, all servers at once. */
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>

int main(int argc, char **argv)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *all, *one;
	char text[INET6_ADDRSTRLEN];
	int err;

	if (argc != 2)
		return 2;
	err = getaddrinfo(argv[1], NULL, &hints, &all);
	if (err) {
		puts(gai_strerror(err));
		return 1;
	}
	for (one = all; one; one = one->ai_next) {
		const void *addr = one->ai_family == AF_INET ?
					   (const void *)&((struct sockaddr_in *)one->ai_addr)->sin_addr :
					   (const void *)&((struct sockaddr_in6 *)one->ai_addr)->sin6_addr;
		puts(inet_ntop(one->ai_family, addr, text, sizeof(text)));
	}
	return 0;
}
