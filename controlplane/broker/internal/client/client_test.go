package client

import (
	"errors"
	"log/slog"
)

var (
	discard = slog.New(slog.DiscardHandler)
	errTest = errors.New("not valid")
)
