package zone

import (
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Names in this package are in wire format (RFC 1035, section 3.1), without compression: each label follows its length,
// and the root's empty label comes last. Names in a zone are lower case.
var (
	origin  = wireName("clusterset", "local")
	svcName = wireName("svc", "clusterset", "local")
)

// Origin is the name of the zone in presentation format.
const Origin = "clusterset.local."

// maxName and maxLabel are the limits of RFC 1035, section 2.3.4, in bytes: of a name in wire format, and of a label
// without its length.
const (
	maxName  = 255
	maxLabel = 63
)

// wireName returns the name made of labels, leftmost first.
func wireName(labels ...string) string { return under("\x00", labels...) }

// under returns the name made of labels below parent.
func under(parent string, labels ...string) string {
	n := len(parent)
	for _, l := range labels {
		n += 1 + len(l)
	}
	b := make([]byte, 0, n)
	for _, l := range labels {
		b = append(b, byte(len(l)))
		b = append(b, l...)
	}
	return string(append(b, parent...))
}

// NameOf returns the DNS name of a Service as a zone file writes it.
func NameOf(s clusterset.ServiceName) string { return Text(under(svcName, s.Name, s.Namespace)) }

// parent returns name without its first label. name must not be the root.
func parent(name string) string { return name[1+int(name[0]):] }

// labelsOf returns the number of labels of a name, not counting the root's.
func labelsOf[S string | []byte](name S) int {
	n := 0
	for i := 0; name[i] != 0; i += 1 + int(name[i]) {
		n++
	}
	return n
}

// Text returns a name as a zone file writes it (RFC 1035, section 5.1), "." for the root. name must be well-formed.
func Text(name string) string {
	if name == "\x00" {
		return "."
	}
	var b strings.Builder
	for name[0] != 0 {
		for _, c := range []byte(name[1 : 1+int(name[0])]) {
			switch {
			case c == '.' || c == '\\' || c == '"' || c == ';' || c == '(' || c == ')' || c == '@' || c == '$':
				b.WriteByte('\\')
				b.WriteByte(c)
			case c <= ' ' || c >= 0x7f:
				b.WriteByte('\\')
				b.WriteByte('0' + c/100)
				b.WriteByte('0' + c/10%10)
				b.WriteByte('0' + c%10)
			default:
				b.WriteByte(c)
			}
		}
		b.WriteByte('.')
		name = parent(name)
	}
	return b.String()
}

// isLabel reports whether s can be a label of a Kubernetes name: 1 to 63 of a-z, 0-9, '-' and '_'.
func isLabel(s string) bool {
	if s == "" || len(s) > maxLabel {
		return false
	}
	for _, c := range []byte(s) {
		if !(c == '-' || c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z') {
			return false
		}
	}
	return true
}

// isName reports whether s is exactly one well-formed name.
func isName(s string) bool {
	if len(s) > maxName {
		return false
	}
	for s != "" {
		n := int(s[0])
		if n == 0 {
			return len(s) == 1
		}
		if n > maxLabel || len(s) <= n {
			return false
		}
		s = s[1+n:]
	}
	return false
}

// nameLen returns the length of the name that s begins with.
func nameLen(s string) int {
	n := 0
	for s[n] != 0 {
		n += 1 + int(s[n])
	}
	return n + 1
}
