// Package gateways_test takes gateways away from connections, and gives them back: for each balancer, return path, way to announce and
// address family, thousands of connections go on while a gateway dies, joins again and is drained.
//
// Each cell of the matrix is an edge of its own ([edge.Lab]) with complete gateways, as on machines of their own, a router (FRR) and servers
// behind it. The test is the gateways' controller. `make test` runs four cells with a quarter of the connections, and `make test-gateways` all.
package gateways_test
