// SPDX-License-Identifier: Apache-2.0

// Command kubebinary builds the program that is etcd and all of Kubernetes, unless it is in the cache, and prints its path. It is what
// make kube runs.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/redirector-dataplane/redirector/test/kube"
)

func main() {
	path, err := kube.Binary(context.Background(), os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(path)
}
