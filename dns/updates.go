package dns

import "time"

// UpdateBuckets are the upper bounds of Updates.Buckets, in seconds.
var UpdateBuckets = [...]float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1}

// Updates is how long it took from a changed world to answers from it, as a histogram.
type Updates struct {
	Count   uint64
	Sum     float64                    // seconds
	Buckets [len(UpdateBuckets)]uint64 // how many took no longer than the bound, each counted in all that it fits
}

func (u *Updates) observe(d time.Duration) {
	u.Count++
	u.Sum += d.Seconds()
	for i, bound := range UpdateBuckets {
		if d.Seconds() <= bound {
			u.Buckets[i]++
		}
	}
}
