package broker

import (
	"context"
	"log/slog"
)

// What controller-runtime reports as an error whenever a leader is told to end: that it leads no more.
const (
	partingMessage = "error received after stop sequence was engaged"
	partingError   = "leader election lost"
)

// parting passes everything on to a handler but that one report, since nobody has to act on it.
type parting struct{ slog.Handler }

// Handle passes r on, unless it is the report.
func (p parting) Handle(ctx context.Context, r slog.Record) error {
	expected := false
	if r.Message == partingMessage {
		r.Attrs(func(a slog.Attr) bool {
			expected = expected || a.Value.String() == partingError
			return !expected
		})
	}
	if expected {
		return nil
	}
	return p.Handler.Handle(ctx, r)
}

// WithAttrs is that of slog.Handler.
func (p parting) WithAttrs(attrs []slog.Attr) slog.Handler {
	return parting{p.Handler.WithAttrs(attrs)}
}

// WithGroup is that of slog.Handler.
func (p parting) WithGroup(name string) slog.Handler {
	return parting{p.Handler.WithGroup(name)}
}
