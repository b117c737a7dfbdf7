package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// A download takes as long as was asked for and is as long as it says, and what cannot be asked for is refused.
func TestStream(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(stream))
	defer s.Close()
	get := func(query string) (status int, length, bytes int64) {
		t.Helper()
		r, err := http.Get(s.URL + "?" + query)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, r.ContentLength, n
	}
	begin := time.Now()
	if _, length, n := get("seconds=1"); n != length || n != streamTicks*streamChunk || time.Since(begin) < 900*time.Millisecond {
		t.Errorf("%d bytes of %d in %s", n, length, time.Since(begin))
	}
	for _, query := range []string{"", "seconds=0", "seconds=x", "seconds=100000"} {
		if status, _, _ := get(query); status != http.StatusBadRequest {
			t.Errorf("%q: %d", query, status)
		}
	}
}

func TestUpload(t *testing.T) {
	w := httptest.NewRecorder()
	upload(w, httptest.NewRequest(http.MethodPut, "/upload", strings.NewReader("12345")))
	if have := w.Body.String(); have != "5\n" {
		t.Errorf("have %q", have)
	}
}
