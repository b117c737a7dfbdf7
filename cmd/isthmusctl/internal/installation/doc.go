// Package installation upgrades and removes what the chart installed in a cluster, step by step. It uses Helm's own library, so that
// `helm history` and `helm rollback` know what it did.
//
// For example, the plan of an upgrade from v0.1.0 to v0.2.0 has three steps: the controllers, the agents, the gateways. Each is a revision
// of the Helm release. In the first one, the objects of agents and gateways are still those of v0.1.0, byte for byte.
package installation
