// Package zone is what is known of clusterset.local, ready for the wire.
//
// A [Zone] is immutable. It holds every name that exists with its records as they stand in an answer, found by one
// hash of the name, and whatever it holds a [Builder] has made of a [clusterset.Snapshot] (KEP-1645, "DNS
// specification", schema 1.0.0; the profile's additions are options of [Config]). The next Zone shares all that has
// not changed, so that a change costs what it changes, not what there is.
package zone
