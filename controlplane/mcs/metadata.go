package mcs

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The bounds of one export. Importers copy labels and annotations onto objects of their own, and compare ports with each
// other, so one export must not make those expensive. The broker's admission policies and the schema of ExportRecord have
// the same numbers.
const (
	// MaxPorts bounds the ports of a Service and of an EndpointSlice.
	MaxPorts = 1000
	// MaxLabels bounds each set of labels, and the annotations.
	MaxLabels = 64
	// MaxAnnotationBytes bounds the keys and values of the annotations together. Kubernetes allows 256 KiB on an object.
	MaxAnnotationBytes = 64 << 10
	// maxClusters bounds the exporters that an aggregate lists.
	maxClusters = 1000
)

// Omission is a part of an object that is left out because other clusters could not use it, or because its author may not
// set it. Its object counts without that part.
type Omission struct {
	Field  string // such as spec.exportedLabels[note]
	Reason string // with the remedy
}

// Error returns the field and the reason.
func (o Omission) Error() string { return o.Field + ": " + o.Reason }

// Kind returns the field without a key, for the label of a metric.
func (o Omission) Kind() string {
	kind, _, _ := strings.Cut(o.Field, "[")
	return kind
}

// omissions collects the omissions of one object.
type omissions []Omission

func (o *omissions) add(field, format string, args ...any) {
	if len(*o) == maxOmissions {
		return
	}
	*o = append(*o, Omission{shorten(field), fmt.Sprintf(format, args...)})
}

// shorten returns at most 100 bytes of s, so that no message repeats a long key or value.
func shorten(s string) string {
	const most = 100
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// maxOmissions bounds the omissions of an object. Sets of more than MaxLabels entries are read in order, so that the first
// omissions of equal objects are equal.
const maxOmissions = 200

// faultFunc returns the reason why no import may have an entry, with the remedy; "" for an entry that it may have, and silent
// for one that is left out without a word.
type faultFunc func(key, value string) (reason string)

const silent = "-"

// labels returns a copy of the labels of a field that other clusters can have, in at most MaxLabels entries; nil if there is
// none.
func (o *omissions) labels(field string, labels map[string]string) map[string]string {
	return o.filter(field, labels, labelFault)
}

// serviceLabels is labels for those of a Service, without the labels of Kubernetes and Isthmus, which have effects in another
// cluster.
func (o *omissions) serviceLabels(field string, labels map[string]string) map[string]string {
	return o.filter(field, labels, serviceLabelFault)
}

// annotations is labels for annotations, in at most MaxAnnotationBytes.
func (o *omissions) annotations(field string, annotations map[string]string) map[string]string {
	kept := o.filter(field, annotations, annotationFault)
	size := 0
	for k, v := range kept {
		size += len(k) + len(v)
	}
	if size <= MaxAnnotationBytes {
		return kept
	}
	size = 0
	for _, k := range slices.Sorted(maps.Keys(kept)) {
		if n := len(k) + len(kept[k]); size+n <= MaxAnnotationBytes {
			size += n
			continue
		}
		delete(kept, k)
		o.add(entry(field, k), "the annotations have more than %d bytes together; shorten them", MaxAnnotationBytes)
	}
	return kept
}

// filter returns a copy of the entries of a field without faults, in at most MaxLabels entries; nil if there is none.
func (o *omissions) filter(field string, m map[string]string, fault faultFunc) map[string]string {
	if len(m) == 0 {
		return nil
	}
	from, kept := len(*o), maps.Clone(m)
	if len(m) <= MaxLabels {
		for k, v := range m {
			o.check(field, k, v, kept, fault)
		}
	} else {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			o.check(field, k, m[k], kept, fault)
		}
	}
	if len(kept) > MaxLabels {
		o.add(field, "has %d entries; at most %d are used, the first ones by key", len(kept), MaxLabels)
		for _, k := range slices.Sorted(maps.Keys(kept))[MaxLabels:] {
			delete(kept, k)
		}
	}
	slices.SortFunc((*o)[from:], func(a, b Omission) int { return strings.Compare(a.Field, b.Field) })
	if len(kept) == 0 {
		return nil
	}
	return kept
}

// check removes an entry with a fault from kept.
func (o *omissions) check(field, key, value string, kept map[string]string, fault faultFunc) {
	switch reason := fault(key, value); reason {
	case "":
	case silent:
		delete(kept, key)
	default:
		delete(kept, key)
		o.add(entry(field, key), "%s", reason)
	}
}

// entry names an entry of a field.
func entry(field, key string) string { return field + "[" + key + "]" }

const reservedKey = "the key is reserved; use one of another domain"

func labelFault(key, value string) string {
	switch {
	case !isQualifiedName(key):
		return "the key is not a label key; use letters, digits, '-', '_' and '.', with an optional DNS prefix and '/'"
	case isReserved(key):
		return reservedKey
	case !isLabelValue(value):
		return fmt.Sprintf("the value %q is not a label value; use at most 63 letters, digits, '-', '_' and '.', and no spaces", shorten(value))
	}
	return ""
}

// ownDomains are the domains of labels that have an effect in their own cluster.
var ownDomains = []string{"kubernetes.io", "k8s.io", "isthmus.dev"}

func serviceLabelFault(key, value string) string {
	if domain, _, qualified := strings.Cut(key, "/"); qualified && inDomains(domain, ownDomains) {
		return silent
	}
	return labelFault(key, value)
}

func annotationFault(key, _ string) string {
	switch {
	case !isQualifiedName(strings.ToLower(key)): // as Kubernetes compares it
		return "the key is not an annotation key; use letters, digits, '-', '_' and '.', with an optional DNS prefix and '/'"
	case isReserved(key) && !clusterset.IsPolicyAnnotation(key):
		return reservedKey
	}
	return ""
}

// reservedDomains are the domains of labels and annotations, including their subdomains, that have effects on imports.
var reservedDomains = []string{"isthmus.dev", "submariner.io", "multicluster.kubernetes.io", "multicluster.x-k8s.io", "endpointslice.kubernetes.io", "kubectl.kubernetes.io"}

// isReserved reports whether a label or annotation has an effect on imports, so that no exporter may set it.
func isReserved(key string) bool {
	switch key {
	case discoveryv1.LabelServiceName, v1alpha1.LabelManagedBy, corev1.IsHeadlessService:
		return true
	}
	domain, _, qualified := strings.Cut(strings.ToLower(key), "/")
	return qualified && inDomains(domain, reservedDomains)
}

// inDomains reports whether domain is one of domains or a subdomain.
func inDomains(domain string, domains []string) bool {
	return slices.ContainsFunc(domains, func(d string) bool {
		return strings.HasSuffix(domain, d) && (len(domain) == len(d) || domain[len(domain)-len(d)-1] == '.')
	})
}

// isQualifiedName reports whether s is a key of labels by the rules of Kubernetes: a name of at most 63 characters, and an
// optional DNS prefix with a slash.
func isQualifiedName(s string) bool {
	prefix, name, qualified := strings.Cut(s, "/")
	if !qualified {
		prefix, name = "", s
	}
	return (!qualified || isSubdomain(prefix)) && name != "" && isLabelValue(name)
}

// isLabelValue reports whether s is the value of a label by the rules of Kubernetes.
func isLabelValue(s string) bool {
	if s == "" {
		return true
	}
	if len(s) > 63 || !isAlphanumeric(s[0]) || !isAlphanumeric(s[len(s)-1]) {
		return false
	}
	for _, c := range []byte(s) {
		if !isAlphanumeric(c) && c != '-' && c != '_' && c != '.' {
			return false
		}
	}
	return true
}

func isAlphanumeric(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// isSubdomain reports whether s is an RFC 1123 subdomain.
func isSubdomain(s string) bool {
	if len(s) > maxName {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if !clusterset.IsLabel(label, maxName) {
			return false
		}
	}
	return true
}
