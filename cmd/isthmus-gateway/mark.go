package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// mark is a file that tells a gateway that its predecessor ended without a drain: neighbours may still send packets here.
// It holds the boot id, because a reboot removes everything that the predecessor balanced with.
type mark string

// bootIDPath holds the id of the current boot.
const bootIDPath = "/proc/sys/kernel/random/boot_id"

// set writes the mark with the current boot id.
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

// isSet reports whether the mark exists and is from the current boot.
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
