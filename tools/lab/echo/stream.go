package main

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// A download of n seconds is n*streamTicks chunks of streamChunk bytes, one after the other in time: slow enough to leave
// room for others, fast enough that something is always under way.
const (
	streamTicks = 50
	streamChunk = 16 << 10
	streamLimit = 3600 // seconds
)

// stream is GET /stream?seconds=60: a download for so long. Its length is known beforehand, so that a client knows when it
// is not whole.
func stream(w http.ResponseWriter, r *http.Request) {
	seconds, err := strconv.Atoi(r.URL.Query().Get("seconds"))
	if err != nil || seconds < 1 || seconds > streamLimit {
		http.Error(w, fmt.Sprintf("the parameter seconds is %q; it can be 1 to %d", r.URL.Query().Get("seconds"), streamLimit), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Length", strconv.Itoa(seconds*streamTicks*streamChunk))
	chunk := make([]byte, streamChunk)
	tick := time.NewTicker(time.Second / streamTicks)
	defer tick.Stop()
	for range seconds * streamTicks {
		if _, err := w.Write(chunk); err != nil {
			return // the client left
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
		}
	}
}

// upload takes what a client sends and says how many bytes that was.
func upload(w http.ResponseWriter, r *http.Request) {
	n, err := io.Copy(io.Discard, r.Body)
	if err != nil {
		return // the client left
	}
	fmt.Fprintln(w, n)
}
