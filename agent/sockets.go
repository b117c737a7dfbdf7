package agent

import (
	"context"
	"time"
)

// staleSocketCloser closes the UDP sockets of removed backends.
type staleSocketCloser interface {
	CloseStale(ctx context.Context) (closed int, err error)
}

// closeStaleSockets closes the sockets of removed backends after each notification, at most once a second: it visits
// every network namespace of the node.
func (a *Agent) closeStaleSockets(ctx context.Context) error {
	pause := time.NewTicker(time.Second)
	defer pause.Stop()
	var failed string
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.staleSockets.C():
		}
		n, err := a.sockets.CloseStale(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			failed = ""
		case err.Error() != failed:
			failed = err.Error()
			a.log.Error("close sockets of removed backends; will try again after the next removal", "err", err)
		}
		if n > 0 {
			a.log.Info("closed UDP sockets of removed backends", "sockets", n)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}
