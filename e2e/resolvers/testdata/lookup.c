/*
 * lookup resolves a name through the C library: addresses with getaddrinfo, and SRV records with res_query, the only
 *way that C libraries offer for these. It prints one address, or priority, weight, port and target, on each line.
 *
 *	lookup A|AAAA|SRV NAME
 */
#include <arpa/inet.h>
#include <arpa/nameser.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

static int addresses(const char *name, int family)
{
	struct addrinfo hints = { .ai_family = family, .ai_socktype = SOCK_STREAM }, *found, *a;
	int err = getaddrinfo(name, NULL, &hints, &found);

	if (err) {
		fprintf(stderr, "getaddrinfo: %s\n", gai_strerror(err));
		return 1;
	}
	for (a = found; a; a = a->ai_next) {
		char text[INET6_ADDRSTRLEN];

		if (getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof(text), NULL, 0, NI_NUMERICHOST))
			return 1;
		puts(text);
	}
	freeaddrinfo(found);
	return 0;
}

static int services(const char *name)
{
	static unsigned char answer[65535];
	int i, len = res_query(name, C_IN, T_SRV, answer, sizeof(answer));
	ns_msg msg;

	if (len < 0 || ns_initparse(answer, len, &msg)) {
		fprintf(stderr, "res_query: no answer\n");
		return 1;
	}
	for (i = 0; i < ns_msg_count(msg, ns_s_an); i++) {
		char target[NS_MAXDNAME];
		const unsigned char *d;
		ns_rr rr;

		if (ns_parserr(&msg, ns_s_an, i, &rr))
			return 1;
		d = ns_rr_rdata(rr);
		if (dn_expand(answer, answer + len, d + 6, target, sizeof(target)) < 0)
			return 1;
		printf("%d %d %d %s\n", ns_get16(d), ns_get16(d + 2), ns_get16(d + 4), target);
	}
	return 0;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	if (!strcmp(argv[1], "SRV"))
		return services(argv[2]);
	return addresses(argv[2], strcmp(argv[1], "A") ? AF_INET6 : AF_INET);
}
