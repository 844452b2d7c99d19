# Ten minutes that tell whether lapclip works on this Windows computer: everything that its authors could not try.
#
#     powershell -ExecutionPolicy Bypass -File dev\windows_check.ps1 [-Minutes 10] [-Only NAME]
#
# Works in Windows PowerShell 5.1 and in PowerShell 7. Makes an environment of its own in .venv-check (once; the download
# is 0.3 GB and not part of the ten minutes), trains and kills small runs in a temporary folder, and prints one block to paste
# into an issue. Nothing is sent anywhere.
param(
    [double] $Minutes = 10,
    [string[]] $Only = @()
)

Set-StrictMode -Version 2.0
$ErrorActionPreference = 'Stop'
Set-Location -LiteralPath (Split-Path -Parent $PSScriptRoot)

# Neither PowerShell ends where a program fails, unless it is told to.
function Invoke-Program {
    param([string] $Program, [string[]] $Words)
    & $Program @Words
    if ($LASTEXITCODE -ne 0) {
        Write-Host "$Program $Words ended with $LASTEXITCODE"
        exit $LASTEXITCODE
    }
}

$python = Join-Path '.venv-check' 'Scripts\python.exe'
$ready = Join-Path '.venv-check' 'ready'
$extras = '.[test,serve,export,sensors]'
$torch = 'torch==2.13.0'

if (-not (Test-Path -LiteralPath $ready)) {
    Write-Host 'Setting up .venv-check (once)'
    if (Test-Path -LiteralPath '.venv-check') {
        Remove-Item -LiteralPath '.venv-check' -Recurse -Force
    }
    if (Get-Command 'uv' -ErrorAction SilentlyContinue) {
        # `auto` takes the build for CUDA where there is an NVIDIA GPU: the registry's own for Windows knows the CPU alone.
        Invoke-Program 'uv' @('venv', '--quiet', '--python', '3.12', '.venv-check')
        Invoke-Program 'uv' @('pip', 'install', '--quiet', '--python', $python, '--torch-backend', 'auto', $torch, '--editable', $extras)
    }
    elseif (Get-Command 'py' -ErrorAction SilentlyContinue) {
        & 'py' '-3' '-c' 'import sys; sys.exit(sys.version_info < (3, 11))'
        if ($LASTEXITCODE -ne 0) {
            Write-Host 'lapclip needs Python 3.11 or later, and py starts an older one.'
            Write-Host 'Try: winget install astral-sh.uv; then this again in a new window'
            exit 2
        }
        Invoke-Program 'py' @('-3', '-m', 'venv', '.venv-check')
        Invoke-Program $python @('-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', $torch)
        Invoke-Program $python @('-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--editable', $extras)
    }
    else {
        Write-Host 'lapclip needs Python 3.11 or later, and there is none here.'
        Write-Host 'Try: winget install astral-sh.uv; then this again in a new window'
        exit 2
    }
    New-Item -ItemType File -Path $ready | Out-Null
}

$words = @('dev\platform_check.py', '--minutes', $Minutes.ToString([Globalization.CultureInfo]::InvariantCulture))
foreach ($name in $Only) {
    $words += @('--only', $name)
}
& $python @words
exit $LASTEXITCODE
