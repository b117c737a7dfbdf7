// Package zone holds the records of clusterset.local in wire format and answers questions from them.
//
// A [Zone] is immutable. It maps each existing name to its records, encoded as they appear in an answer. One hash of
// the name finds them. A [Builder] makes a Zone from a [clusterset.Snapshot] and follows KEP-1645, "DNS
// specification", schema 1.0.0; options in [Config] add what other profiles want. The next Zone shares everything
// that has not changed, so an update costs as much as its changes, not as much as the zone.
package zone
