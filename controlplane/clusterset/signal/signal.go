// Package signal wakes a goroutine that has work to do. Signals coalesce: the receiver is woken once after any
// number of notifications, and then looks for all the work there is.
package signal

// Signal holds at most one pending notification. Make it with New; copies share it.
// It may be notified and received from by any number of goroutines; each notification wakes one of them.
type Signal struct{ pending chan struct{} }

// New returns a Signal with no notification pending.
func New() Signal { return Signal{pending: make(chan struct{}, 1)} }

// Notify makes a notification pending. It never blocks, and does nothing while one is pending already.
func (s Signal) Notify() {
	select {
	case s.pending <- struct{}{}:
	default:
	}
}

// C returns the channel that delivers the pending notification. A notification that comes after a receive
// stays pending for the next receive, so no work is missed between the receive and the look for work.
func (s Signal) C() <-chan struct{} { return s.pending }
