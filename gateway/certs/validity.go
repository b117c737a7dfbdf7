package certs

import (
	"crypto/x509"
	"time"
)

// Validity is the time during which a certificate is valid.
type Validity struct{ NotBefore, NotAfter time.Time }

// ValidityOf returns the validity of a certificate.
func ValidityOf(c *x509.Certificate) Validity { return Validity{c.NotBefore.UTC(), c.NotAfter.UTC()} }

// RenewalDue reports whether less than a third of the time is left. Folder, the gateway controller and cert-manager renew then.
func (v Validity) RenewalDue(now time.Time) bool { return v.left(now) < v.life()/3 }

// RenewalOverdue reports whether less than a quarter of the time is left. An administrator has to look why nothing renewed it.
func (v Validity) RenewalOverdue(now time.Time) bool { return v.left(now) < v.life()/4 }

func (v Validity) life() time.Duration { return v.NotAfter.Sub(v.NotBefore) }

func (v Validity) left(now time.Time) time.Duration { return v.NotAfter.Sub(now) }
