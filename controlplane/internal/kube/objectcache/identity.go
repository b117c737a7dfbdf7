package objectcache

import (
	"encoding/hex"
	"strconv"
	"strings"
	"unique"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Identity is the name, UID and resource version of an object in 32 bytes, for a [Packed] of which there are many. Objects of
// one name, such as the same object in several clusters, share the memory of the name.
type Identity struct {
	name    unique.Handle[string]
	uid     [16]byte
	version uint64
}

// Identify returns the identity of an object, false if its UID or version differs from the form that API servers use.
func Identify(o client.Object) (Identity, bool) {
	i := Identity{name: unique.Make(o.GetName())}
	digits, err := hex.DecodeString(strings.ReplaceAll(string(o.GetUID()), "-", ""))
	if err != nil || copy(i.uid[:], digits) != len(i.uid) || i.formatUID() != o.GetUID() {
		return Identity{}, false
	}
	i.version, err = strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	return i, err == nil && strconv.FormatUint(i.version, 10) == o.GetResourceVersion()
}

// Name returns the name, in memory that all identities of that name share.
func (i Identity) Name() string { return i.name.Value() }

// Meta returns metadata in a namespace that has the identity and nothing else.
func (i Identity) Meta(namespace string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: i.Name(), UID: i.formatUID(), ResourceVersion: strconv.FormatUint(i.version, 10)}
}

// formatUID formats the UID as API servers do (RFC 9562, section 4).
func (i Identity) formatUID() types.UID {
	h := hex.EncodeToString(i.uid[:])
	return types.UID(h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:])
}
