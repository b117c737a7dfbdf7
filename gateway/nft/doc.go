// Package nft balances with nftables. A state comes in and becomes elements of a few sets and maps of one table of ours, inet
// isthmus-gateway; the rules are the same ones whatever the state is, and number as many for a thousand VIPs as for one, but for
// some that each time of session affinity has of its own.
//
// Every gateway chooses the same backend for the same client, since all have the same Maglev tables and hash alike, so a
// connection that began elsewhere goes on here. Connections that are older than a change of backends do not follow the hash:
// where the backends' network routes (desired.Routed) the first packet from the backend's side tells of them.
package nft
