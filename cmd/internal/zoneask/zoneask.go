// Package zoneask asks name servers whether they answer for clusterset.local, themselves or through another server.
package zoneask

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// version is a name with a TXT record in every implementation of the zone.
const version = "dns-version.clusterset.local."

// timeout is the time that an answer may take.
const timeout = 3 * time.Second

// ErrNotServed is the error for a server that answers that the name does not exist.
var ErrNotServed = errors.New("it has no zone clusterset.local; isthmusctl dns install forwards the zone to the agents")

// Ask returns nil if the servers of r answer for the zone, ErrNotServed if they answer that it does not exist, and another
// error if they do not answer.
func Ask(ctx context.Context, r *net.Resolver) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
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
