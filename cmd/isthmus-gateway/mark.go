package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// mark is the file by which a gateway knows that a predecessor ended without a word: neighbours may still lead packets here.
// It holds the id of the machine's boot, since with a reboot all that the predecessor balanced with is gone.
type mark string

// bootIDPath is where Linux tells which boot this is.
const bootIDPath = "/proc/sys/kernel/random/boot_id"

// set makes the mark, of this boot.
func (m mark) set() error {
	boot, err := os.ReadFile(bootIDPath)
	if err == nil {
		err = os.WriteFile(string(m), boot, 0o600)
	}
	if err != nil {
		return fmt.Errorf("mark that this gateway serves: %w", err)
	}
	return nil
}

// isSet reports whether there is the mark, and of this boot.
func (m mark) isSet() (bool, error) {
	made, err := os.ReadFile(string(m))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	boot, err := os.ReadFile(bootIDPath)
	return bytes.Equal(made, boot), err
}
