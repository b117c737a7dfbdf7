package liveness

import "time"

// samples is how many renewals a clock's offset is learned from: at the default pace those of the last two
// minutes or so, so that a clock that was set is believed soon.
const samples = 24

// offset is by how much a clock is behind ours, learned from messages that carry its time.
type offset struct {
	ring [samples]time.Duration
	n    int // how many there were
}

// add learns from a message that was sent at sent, by the other clock, and arrived at received, by ours.
func (o *offset) add(sent, received time.Time) {
	o.ring[o.n%samples] = received.Round(0).Sub(sent.Round(0)) // of wall clocks
	o.n++
}

// least returns the smallest difference lately: that of the message that travelled fastest.
func (o *offset) least() (time.Duration, bool) {
	if o.n == 0 {
		return 0, false
	}
	least := o.ring[0]
	for _, d := range o.ring[:min(o.n, samples)] {
		least = min(least, d)
	}
	return least, true
}
