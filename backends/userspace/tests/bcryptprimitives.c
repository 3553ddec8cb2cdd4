// The one function of Windows' bcryptprimitives.dll that Rust's standard library calls, for Wine before 9.0, which has no such
// library.

#include <windows.h>
#include <ntsecapi.h>

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T length)
{
	return RtlGenRandom(data, (ULONG)length);
}
