package clusterset

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// Digest identifies a set of names, whatever the order in which they came. The zero value is that of the empty set. It tells
// different sets apart by accident, not against somebody who looks for two equal ones.
type Digest struct {
	count int
	sum   uint64
}

// Add adds a name that is not in the set.
func (d *Digest) Add(name string) {
	d.count++
	d.sum += hashName(name)
}

// Remove removes a name that is in the set.
func (d *Digest) Remove(name string) {
	d.count--
	d.sum -= hashName(name)
}

// Merge adds the names of o, none of which is in the set.
func (d *Digest) Merge(o Digest) {
	d.count += o.count
	d.sum += o.sum
}

// String returns the number of names and a hash, such as "2-9f86d081884c7d65".
func (d Digest) String() string { return fmt.Sprintf("%d-%016x", d.count, d.sum) }

func hashName(name string) uint64 {
	sum := sha256.Sum256([]byte(name))
	return binary.BigEndian.Uint64(sum[:])
}
