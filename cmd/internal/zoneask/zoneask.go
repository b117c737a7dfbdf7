// Package zoneask asks name servers whether they answer for clusterset.local, whoever serves it behind them.
package zoneask

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// version has a TXT record in every zone of a ClusterSet.
const version = "dns-version.clusterset.local."

// patience is how long an answer may take.
const patience = 3 * time.Second

// ErrNotServed is the answer of a server that knows nothing of the zone.
var ErrNotServed = errors.New("it knows no clusterset.local; isthmusctl dns install sends the zone to the agents")

// Ask returns nil when the servers of r answer for the zone, ErrNotServed when they say that there is none, and another
// error when nobody answers.
func Ask(ctx context.Context, r *net.Resolver) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err := r.LookupTXT(ctx, version)
	if err == nil {
		return nil
	}
	var d *net.DNSError
	if errors.As(err, &d) && d.IsNotFound {
		return ErrNotServed
	}
	return fmt.Errorf("it does not answer: %s", strings.TrimPrefix(err.Error(), "lookup "+version+": "))
}
