package liveness

import "time"

// offsetSamples is how many renewals determine a clock's offset: at the default interval those of the last two minutes, so
// that a corrected clock takes effect soon.
const offsetSamples = 24

// offset estimates our clock minus another one, from messages that carry the other's time.
type offset struct {
	ring [offsetSamples]time.Duration
	n    int // samples so far
}

// add records one message: sent is its time by the sender's clock, received its arrival by ours.
func (o *offset) add(sent, received time.Time) {
	o.ring[o.n%offsetSamples] = received.Round(0).Sub(sent.Round(0)) // wall clocks
	o.n++
}

// least returns the smallest recent difference: that of the message with the shortest transit.
func (o *offset) least() (time.Duration, bool) {
	if o.n == 0 {
		return 0, false
	}
	least := o.ring[0]
	for _, d := range o.ring[:min(o.n, offsetSamples)] {
		least = min(least, d)
	}
	return least, true
}
