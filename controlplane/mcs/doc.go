// Package mcs translates between the domain (controlplane/clusterset) and Kubernetes objects: the ServiceExport,
// ServiceImport and EndpointSlice of users and of the MCS API, and Isthmus' own ExportRecord. Its functions are pure: no
// client, no context, no clock, no log. They do not change their arguments, and their results share no memory with them
// unless a comment says so.
//
// An exported Service travels through these functions:
//
//	ServiceExport, Service    -> Export          the member's export
//	Export                    -> ExportRecord    ... as an object of the broker; ParseRecord is the inverse
//	EndpointSlice of a member -> BrokerSlice     its endpoints, as an object of the broker
//	Import (merged)           -> ServiceImport   the import in every member; Import is the inverse
//	BrokerSlice               -> ImportedSlice   ... with its endpoints; Slice parses it
package mcs
