package broker

import (
	"context"
	"log/slog"
)

// controller-runtime reports this error whenever a leader is told to stop, because it no longer leads.
const (
	stopMessage = "error received after stop sequence was engaged"
	stopError   = "leader election lost"
)

// stopFilter drops that one report, which needs no action, and passes everything else to its handler.
type stopFilter struct{ slog.Handler }

// Handle is part of slog.Handler.
func (f stopFilter) Handle(ctx context.Context, r slog.Record) error {
	expected := false
	if r.Message == stopMessage {
		r.Attrs(func(a slog.Attr) bool {
			expected = expected || a.Value.String() == stopError
			return !expected
		})
	}
	if expected {
		return nil
	}
	return f.Handler.Handle(ctx, r)
}

// WithAttrs is part of slog.Handler.
func (f stopFilter) WithAttrs(attrs []slog.Attr) slog.Handler {
	return stopFilter{f.Handler.WithAttrs(attrs)}
}

// WithGroup is part of slog.Handler.
func (f stopFilter) WithGroup(name string) slog.Handler {
	return stopFilter{f.Handler.WithGroup(name)}
}
