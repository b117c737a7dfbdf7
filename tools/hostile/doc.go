// Package hostile draws Kubernetes objects for tests that ask how much harm one object does to bystanders. The objects are
// mostly valid to an API server, and hostile in their fields: sizes, spellings, families, times, duplicates, ports such as 0
// and 65536, addresses of other owners, reserved labels.
//
// For example, a [Generator] with seed 7 draws as its object 12 a ServiceImport of a tenant that names the ClusterIP of the
// API server. A harness applies the object with the tenant's credentials and checks the bystanders. If they are harmed,
// [Shrink] finds the few objects and fields that suffice. The same seed and number draw the same object again.
//
// A [Kind] is one entry of [Kinds]. Another component passes its own kinds to a Generator; the harness must know the
// credentials of their actors.
package hostile
