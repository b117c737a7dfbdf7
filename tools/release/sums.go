package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strings"
)

// sumsFile has the checksums of all files of a release, as sha256sum(1) writes and checks them.
const sumsFile = "SHA256SUMS"

// sums writes the files that refer to others by checksum, and the checksums of all.
func (r *release) sums(context.Context) error {
	if err := r.plugins(); err != nil {
		return err
	}
	entries, err := os.ReadDir(r.output) // sorted
	if err != nil {
		return err
	}
	var all strings.Builder
	for _, e := range entries {
		sum, err := sumOf(r.path(e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&all, "%s  %s\n", sum, e.Name())
	}
	return os.WriteFile(r.path(sumsFile), []byte(all.String()), 0o644)
}

// sumOf returns the SHA-256 of a file, in hexadecimal.
func sumOf(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
