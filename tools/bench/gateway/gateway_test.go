package gateway

import (
	"testing"
	"time"
)

// The bars match the promise: traffic continues within half a second, and planned work loses nothing.
func TestRows(t *testing.T) {
	t.Parallel()
	ms := time.Millisecond
	good := failover{deaths: []time.Duration{300 * ms, 900 * ms, 400 * ms}, cordon: requests{asked: 10}, drain: requests{asked: 10}, crash: requests{asked: 10}}
	bad := good
	bad.crash.lost, bad.cordon.lost, bad.drain.lost, bad.deaths = 1, 1, 1, []time.Duration{501 * ms}
	barred := 0
	for i, r := range rows(good, good) {
		if r.Bar != nil {
			barred++
		}
		if !r.Met() {
			t.Errorf("%s is %v: missed", r.Name, r.Value)
		}
		if missed := rows(bad, bad)[i]; missed.Bar != nil && missed.Met() {
			t.Errorf("%s is %v: met", missed.Name, missed.Value)
		}
	}
	if have := rows(good, good)[0]; barred != 4 || have.Value != 400 || *have.Peer != 400 {
		t.Errorf("%d bars, and the first row is %+v", barred, have)
	}
}
